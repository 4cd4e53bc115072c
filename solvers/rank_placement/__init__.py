"""Placement of pipeline stages on a cluster's nodes, over links of different bandwidth."""
