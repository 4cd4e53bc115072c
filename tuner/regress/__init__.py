"""Stored scenarios planned again and compared with the plans that were accepted for them."""
