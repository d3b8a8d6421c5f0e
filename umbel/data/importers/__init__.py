"""Importers: from a DataFrame, a Hugging Face data set, arrays or a folder of images to a dataset.

Each function returns a `ClientData`, whose ``write("mine")`` makes the dataset for ``dataset = "mine"``.
"""

from umbel.data.importers.arrays import from_arrays, from_image_folder
from umbel.data.importers.client_data import ClientData, Dirichlet, Partitioner, Uniform
from umbel.data.importers.frames import from_dataframe
from umbel.data.importers.hub import from_datasets

__all__ = [
    "ClientData",
    "Dirichlet",
    "Partitioner",
    "Uniform",
    "from_arrays",
    "from_dataframe",
    "from_datasets",
    "from_image_folder",
]
