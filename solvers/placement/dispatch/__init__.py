"""What a runtime does with a placement: which replica each token copy goes to."""
