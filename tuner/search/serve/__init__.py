"""Deployments: from traffic and targets to instances with a certificate, simulated."""
