"""The models of the series, the shapes they are built from, and a Llama."""
