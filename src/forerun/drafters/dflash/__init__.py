"""DFlash: block-parallel drafting over injected target features."""

from forerun.drafters.dflash.decode import DFlash

__all__ = ["DFlash"]
