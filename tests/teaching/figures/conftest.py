import matplotlib.pyplot as plt
import pytest


@pytest.fixture(autouse=True)
def no_window():
    """Figures are drawn in memory, and none stays open."""
    plt.switch_backend("agg")
    yield
    plt.close("all")
