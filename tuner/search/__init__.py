"""Search for a plan of a workload on a machine: predict, search, certify."""
