package gateway

import "fmt"

// RequestClass is the class of a request: under load the lower ones wait longer and are refused first.
type RequestClass uint8

// The classes, the first served first.
const (
	Critical RequestClass = iota
	Default
	Sheddable
	classCount = 3
)

var classNames = [classCount]string{"critical", "default", "sheddable"}

// String returns the name as headers and metrics show it.
func (c RequestClass) String() string {
	if int(c) < classCount {
		return classNames[c]
	}
	return fmt.Sprintf("class(%d)", uint8(c))
}

// ReadClass reads the name of a class; an empty one is default.
func ReadClass(name string) (RequestClass, error) {
	if name == "" {
		return Default, nil
	}
	for c, known := range classNames {
		if name == known {
			return RequestClass(c), nil //nolint:gosec // below classCount
		}
	}
	return Default, fmt.Errorf("class must be critical, default or sheddable, not %q", name)
}
