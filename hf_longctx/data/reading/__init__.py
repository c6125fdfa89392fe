"""From what users have to rows: files of any kind, directories, data sets of the hub, and objects of `datasets`."""

from hf_longctx.data.reading.rows import Place, Refused, Row, SourceError
from hf_longctx.data.reading.source import Source
from hf_longctx.data.reading.unit import Unit

__all__ = ["Place", "Refused", "Row", "Source", "SourceError", "Unit"]
