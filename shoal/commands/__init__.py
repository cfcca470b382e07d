"""What each `shoal` command does, apart from parsing its words and printing its result."""
