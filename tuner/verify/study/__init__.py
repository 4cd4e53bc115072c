"""A study of trials that several processes, on one node or on many, share."""
