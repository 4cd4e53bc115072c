"""The goals: from a spec to a plan folder with its launch files, and to its verification."""
