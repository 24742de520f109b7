from fsdp_helpers.teaching.figures.style import ink_on


def test_ink_is_black_on_light_and_white_on_dark_colors():
    colors = {"#ffffff": "black", "#000000": "white", "#e69f00": "black", "#0072b2": "white"}
    assert {color: ink_on(color) for color in colors} == colors
