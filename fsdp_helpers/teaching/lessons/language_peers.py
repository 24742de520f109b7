"""Our language model compared with Hugging Face's: the same folder, read by both. Notebook 13."""

import importlib.util

import torch

from fsdp_helpers.teaching.lessons.language import start_plain


def compare_with_transformers(folder: str, text: str) -> dict[str, object] | None:
    """Return how far their logits of a text are from ours, and what they generate; None if they are not installed."""
    if importlib.util.find_spec("transformers") is None:
        return None
    import transformers

    transformers.utils.logging.disable_progress_bar()
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    numbers = torch.tensor([list(text.encode())])
    with torch.no_grad():
        ours = start_plain(folder).cpu()(numbers)
        difference = (theirs(numbers).logits - ours).abs().max().item()
        said = theirs.generate(numbers, max_new_tokens=60, do_sample=False, pad_token_id=0)[0].tolist()
    return {
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "text": text,
        "largest_difference": difference,
        "continued": bytes(said).decode(errors="replace"),
    }
