"""Tables, listings, sliders, and a description of the machine that a notebook runs on."""
