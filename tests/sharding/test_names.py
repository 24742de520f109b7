from fsdp_helpers.sharding.wrapping import plain_name


def test_names_without_what_wrappers_add():
    name = "_orig_mod._fsdp_wrapped_module.layers.0._checkpoint_wrapped_module.norm.weight"
    assert plain_name(name) == "layers.0.norm.weight"
    assert plain_name("module.weight") == "module.weight"  # of DDP, or of a model that calls a part so
