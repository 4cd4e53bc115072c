"""What a shared virtual host does to timings, and how a rank reacts: `policy.NoisePolicy`."""
