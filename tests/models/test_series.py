import pytest
import torch
from torch import nn

from fsdp_helpers.config import MODELS
from fsdp_helpers.models.series import build_model, count_params


def test_shallow_parameters():
    # conv 1 x 32 x 3 x 3 + 32 = 320; conv 32 x 64 x 3 x 3 + 64 = 18,496
    # fc 9,216 x 128 + 128 = 1,179,776; fc 128 x 10 + 10 = 1,290
    assert count_params(build_model("shallow")) == 320 + 18_496 + 1_179_776 + 1_290 == 1_199_882


def test_deep_parameters():
    # convolutions 18,816; fc 9,216 x 9,000 + 9,000 = 82,953,000; 9,000 x 1,000 + 1,000 = 9,001,000;
    # twice 1,000 x 1,000 + 1,000 = 2,002,000; 1,000 x 128 + 128 = 128,128; 128 x 10 + 10 = 1,290
    with torch.device("meta"):
        model = build_model("deep")
    assert count_params(model) == 18_816 + 82_953_000 + 9_001_000 + 2_002_000 + 128_128 + 1_290 == 94_104_234


def test_simple_parameters():
    # conv 320 + conv 18,496 + fc 3,136 x 10 + 10 = 31,370
    assert count_params(build_model("simple")) == 320 + 18_496 + 31_370 == 50_186


def test_deep_vision_transformer_parameters():
    # a block of width 256: attention 4 x (256 x 256 + 256) = 263,168; hidden 256 x 1,024 + 1,024 = 263,168 and
    # 1,024 x 256 + 256 = 262,400; two norms 4 x 256 = 1,024; together 789,760. Patches 49 x 256 + 256 = 12,800;
    # positions 16 x 256 = 4,096; the last norm 512; the head 256 x 10 + 10 = 2,570
    model = build_model("vit-deep")
    assert [count_params(block) for block in model.blocks] == [263_168 + 263_168 + 262_400 + 1_024] * 8 == [789_760] * 8
    assert count_params(model) == 8 * 789_760 + 12_800 + 4_096 + 512 + 2_570 == 6_338_058


@pytest.mark.parametrize("name", [name for name in MODELS if name != "deep"])
@pytest.mark.parametrize("num_images", [3, 0])  # a rank's share of the test images may be empty
def test_ten_outputs_an_image(name, num_images):
    model = build_model(name).eval()
    with torch.no_grad():
        assert model(torch.zeros(num_images, 1, 28, 28)).shape == (num_images, 10)


def test_log_probabilities_sum_to_one():
    model = build_model("shallow").eval()
    with torch.no_grad():
        assert torch.allclose(model(torch.randn(4, 1, 28, 28)).exp().sum(dim=1), torch.ones(4))


@pytest.mark.parametrize("name", ["shallow", "vit"])
def test_no_dropout_makes_training_repeatable(name):
    images = torch.randn(4, 1, 28, 28)
    with_dropout, without = build_model(name).train(), build_model(name, dropout=False).train()
    assert not torch.equal(with_dropout(images), with_dropout(images))
    assert torch.equal(without(images), without(images))


def test_dropout_probabilities():
    drops = [module.p for module in build_model("shallow").modules() if isinstance(module, nn.Dropout)]
    assert drops == [0.25, 0.5]
