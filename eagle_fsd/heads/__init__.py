"""Draft heads: EAGLE-1/2 and EAGLE-3, published layouts and heads, export, draft vocabularies."""
