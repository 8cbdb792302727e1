package config

import (
	"errors"
	"fmt"
)

// Checks collects what is wrong with the section of a program.
type Checks struct {
	Section string // the first word of its keys
	errs    []error
}

// Want notes that the value of a key is not as wanted, unless it is ok.
func (c *Checks) Want(ok bool, key string, value any, wanted string) {
	if !ok {
		c.errs = append(c.errs, fmt.Errorf("%s.%s is %v: want %s", c.Section, key, value, wanted))
	}
}

// Add notes errors, of which some may be nil.
func (c *Checks) Add(errs ...error) { c.errs = append(c.errs, errs...) }

// Err is all that was noted.
func (c *Checks) Err() error { return errors.Join(c.errs...) }
