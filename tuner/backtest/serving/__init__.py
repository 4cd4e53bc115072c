"""Published TTFT and TPOT beside what the serving model says of the same launches."""
