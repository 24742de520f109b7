"""JupyterLab as this series wants it: settings, copies to work in, and runs whose outputs are kept."""
