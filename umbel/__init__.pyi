# What `import umbel` offers, for type checkers: at run time each name is imported when it is asked for.
from umbel.cli.plans import plan as plan
from umbel.cli.runs import Run as Run
from umbel.cli.runs import export as export
from umbel.cli.runs import load as load
from umbel.cli.runs import run as run
from umbel.data import Manifest as Manifest
from umbel.data import Schema as Schema
from umbel.data import write_dataset as write_dataset
from umbel.data.importers import Dirichlet as Dirichlet
from umbel.data.importers import Quantity as Quantity
from umbel.data.importers import Uniform as Uniform
from umbel.data.importers import from_arrays as from_arrays
from umbel.data.importers import from_dataframe as from_dataframe
from umbel.data.importers import from_datasets as from_datasets
from umbel.data.importers import from_image_folder as from_image_folder
from umbel.privacy.gate.stock_app import Gate as Gate
from umbel.research.experiments.sweeps import sweep as sweep
