"""The models of the series, a Llama among them, and the shapes they're built from."""
