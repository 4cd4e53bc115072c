"""Log and result parsers of each engine and benchmark client."""
