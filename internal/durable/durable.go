// Package durable writes files that a crash of the machine leaves whole.
package durable

import (
	"errors"
	"os"
	"path/filepath"
)

// WriteFile writes or replaces a file in one step, readable by its owner alone: a program that dies, and a machine that
// loses its power, leaves the old file or the new one. The new one is on the disk when WriteFile returns.
func WriteFile(path string, data []byte) error {
	dir := filepath.Dir(path)
	file, err := os.CreateTemp(dir, ".new-*") // with mode 0600
	if err != nil {
		return err
	}
	defer os.Remove(file.Name())
	_, err = file.Write(data)
	if err == nil {
		err = file.Sync()
	}
	if err := errors.Join(err, file.Close()); err != nil {
		return err
	}
	if err := os.Rename(file.Name(), path); err != nil {
		return err
	}
	return sync(dir) // else the name may be lost
}

func sync(dir string) error {
	d, err := os.Open(dir) //nolint:gosec // the caller's own path
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}
