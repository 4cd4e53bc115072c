"""Why a plan is what it is, and what it would be under other limits: solved again, not guessed."""
