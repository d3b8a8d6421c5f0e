"""Data in: from a DataFrame, a Hugging Face data set, arrays or a folder of images to a federation.

Each function returns a `ClientData`, whose ``write("mine")`` makes what ``federation = "mine"`` finds.
"""

from umbel.data.arrays import from_arrays
from umbel.data.client_data import ClientData
from umbel.data.frames import from_dataframe
from umbel.data.hub import from_datasets
from umbel.data.images import from_image_folder
from umbel.data.partition import Dirichlet, Partitioner, Quantity, Uniform

__all__ = [
    "ClientData",
    "Dirichlet",
    "Partitioner",
    "Quantity",
    "Uniform",
    "from_arrays",
    "from_dataframe",
    "from_datasets",
    "from_image_folder",
]
