"""Published TTFT and TPOT compared with the serving model's predictions."""
