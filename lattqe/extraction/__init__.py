"""From images to features: ResNet-GeM and other encoders, decoding, multi-scale, and the blocks of a resumable job."""
