"""Reference path of a request's KV cache from a prefill instance into one laid out differently."""
