"""The part of the report about one pair of tensors: statistics, pictures, outliers."""
