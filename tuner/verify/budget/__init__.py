"""Spend a budget of time and devices on trials, some of them smaller than the job."""
