"""A decision as a job: its nodes and every rank's configuration; shared by verify and emit."""
