"""Tables and figures made from metrics."""
