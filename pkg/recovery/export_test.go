package recovery

import "time"

// WithBatchLocksMax returns c with another bound on the locks freed in one transaction.
func (c Config) WithBatchLocksMax(n int) Config {
	c.batchLocksMax = n
	return c
}

// WithGiveUp returns c with another time for which passes may fail.
func (c Config) WithGiveUp(after time.Duration) Config {
	c.giveUp = after
	return c
}
