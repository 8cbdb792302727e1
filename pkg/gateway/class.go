package gateway

import "fmt"

// Criticality is the class of a request: under load the lower ones wait longer and are refused first.
type Criticality uint8

// The classes, the first served first.
const (
	Critical Criticality = iota
	Default
	Sheddable
	classCount = 3
)

var criticalityNames = [classCount]string{"critical", "default", "sheddable"}

// String returns the name as headers and metrics show it.
func (c Criticality) String() string {
	if int(c) < classCount {
		return criticalityNames[c]
	}
	return fmt.Sprintf("criticality(%d)", uint8(c))
}

// ReadCriticality reads the name of a class; an empty one is default.
func ReadCriticality(name string) (Criticality, error) {
	if name == "" {
		return Default, nil
	}
	for c, known := range criticalityNames {
		if name == known {
			return Criticality(c), nil //nolint:gosec // below classCount
		}
	}
	return Default, fmt.Errorf("class must be critical, default or sheddable, not %q", name)
}
