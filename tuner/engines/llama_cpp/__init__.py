"""llama.cpp on one host: models larger than the accelerator, their experts in host memory."""
