"""From a workload and a machine to a plan: predict, search, certify."""
