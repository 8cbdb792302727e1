package governor

import (
	"cmp"
	"errors"
	"fmt"
	"time"
)

// Config sets the high and low marks of the gates. Its zero value means the defaults; fractions are
// 0 to 1.
type Config struct {
	// MemoryHigh closes the memory gate for all queues, MemoryLow opens it again and is
	// the bound for the sum of declared needs: fractions of the limit. Defaults 0.90 and 0.80.
	MemoryHigh, MemoryLow float64
	// CPUHigh and CPULow are the same for the CPU used beyond the declared
	// needs: fractions of the cores. Defaults 0.90 and 0.75.
	CPUHigh, CPULow float64
	// Calm is how long use must stay under the low mark before a gate opens. Default 3 s.
	Calm time.Duration
	// RefuseUndeclared lets a closed CPU gate refuse queues that declare no CPU need as well.
	RefuseUndeclared bool
}

const (
	sampleEvery = 500 * time.Millisecond // between readings
	staleAfter  = 5 * time.Second        // the age from which readings are not used
)

func (c Config) withDefaults() Config {
	c.MemoryHigh = cmp.Or(c.MemoryHigh, 0.90)
	c.MemoryLow = cmp.Or(c.MemoryLow, min(0.80, c.MemoryHigh*8/9))
	c.CPUHigh = cmp.Or(c.CPUHigh, 0.90)
	c.CPULow = cmp.Or(c.CPULow, min(0.75, c.CPUHigh*5/6))
	c.Calm = cmp.Or(c.Calm, 3*time.Second)
	return c
}

// Validate returns an error that names each invalid setting and its allowed values.
func (c Config) Validate() error {
	c = c.withDefaults()
	err := errors.Join(validMarks("memory", c.MemoryLow, c.MemoryHigh), validMarks("cpu", c.CPULow, c.CPUHigh))
	if c.Calm < 0 {
		err = errors.Join(err, fmt.Errorf("governor calm: %v: want a duration above zero", c.Calm))
	}
	return err
}

func validMarks(resource string, low, high float64) error {
	if 0 < low && low < high && high <= 1 {
		return nil
	}
	return fmt.Errorf("governor %s marks: low %g, high %g: want 0 < low < high <= 1", resource, low, high)
}
