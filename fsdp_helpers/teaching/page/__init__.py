"""Tables, listings, sliders, and what a page says about its machine."""
