"""Tables, listings, sliders, failure cards, and a description of the machine that a notebook runs on."""
