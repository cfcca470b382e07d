"""How samples are collected: lanes on the head, and what workers run for them."""
