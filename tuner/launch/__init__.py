"""A decision as a job: its nodes and what each rank is told; shared by verify and emit."""
