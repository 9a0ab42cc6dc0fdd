"""The pool of this package's messages."""

from google.protobuf.descriptor_pool import DescriptorPool

POOL = DescriptorPool()
