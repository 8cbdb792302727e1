package gateway

import "fmt"

// Criticality is the criticality of a request: under load the lower ones wait longer and are refused first.
type Criticality uint8

// The criticalities, the first served first.
const (
	Critical Criticality = iota
	Default
	Sheddable
	criticalityCount = 3
)

var criticalityNames = [criticalityCount]string{"critical", "default", "sheddable"}

// String returns the name as headers and metrics show it.
func (c Criticality) String() string {
	if int(c) < criticalityCount {
		return criticalityNames[c]
	}
	return fmt.Sprintf("criticality(%d)", uint8(c))
}

// ReadCriticality reads the name of a criticality; an empty one is default.
func ReadCriticality(name string) (Criticality, error) {
	if name == "" {
		return Default, nil
	}
	for c, known := range criticalityNames {
		if name == known {
			return Criticality(c), nil //nolint:gosec // below criticalityCount
		}
	}
	return Default, fmt.Errorf("criticality must be critical, default or sheddable, not %q", name)
}
