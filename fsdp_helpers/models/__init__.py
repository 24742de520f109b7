"""The series' models, including a Llama, and the shapes they're built from."""
