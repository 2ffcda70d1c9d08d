"""Draft heads: EAGLE-1/2 and EAGLE-3, published layouts, a catalogue of published heads."""
