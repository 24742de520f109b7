"""Tables, listings, sliders, and a page's information about its machine."""
