"""megatron-core without the remarks that it makes at every start."""

import logging
import warnings


def quiet_core() -> None:
    """Keep out of the output what megatron-core says of Apex and TransformerEngine on import.

    To be called before megatron-core is imported, by whatever a person starts. What a run makes of
    the two is said by the run itself.
    """
    warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.core.*")
    warnings.filterwarnings("ignore", category=FutureWarning)
    # megatron-core looks at `.grad` of views on purpose.
    warnings.filterwarnings("ignore", message=r"The \.grad attribute of a Tensor")
    logging.getLogger("megatron.core").setLevel(logging.ERROR)
