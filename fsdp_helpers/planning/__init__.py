"""What a run will take, from arithmetic alone. No torch import."""
