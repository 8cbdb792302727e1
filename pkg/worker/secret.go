package worker

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
)

// ReadSecret returns the secret that ref names: env:NAME from the environment, file:/path from a file, without the
// line end; an empty one is none. It reads any variable and any file: it is for references in the program's own
// configuration. The error names the reference, never a secret.
func ReadSecret(ref string) (string, error) {
	return readReference(ref, os.ReadFile)
}

// SecretPrefix is the beginning of the names of variables that settings in the database may refer to.
const SecretPrefix = "PENSTOCK_SECRET_"

// SecretsDir is where SecretStore looks for files by default.
const SecretsDir = "/run/secrets/penstock"

// secretBytesMax bounds a file that is read as a secret.
const secretBytesMax = 64 << 10

// SecretStore reads secrets that settings in the database refer to, such as headers of models. Clients of the API
// write those settings: a reference reaches variables whose name begins with SecretPrefix, and files below Dir.
type SecretStore struct {
	Dir string // SecretsDir if empty
}

// Read returns the secret that ref names, as ReadSecret does. The default of Config.Secret is that of the zero value.
func (s SecretStore) Read(ref string) (string, error) {
	if err := checkReference(ref); err != nil {
		return "", fmt.Errorf("read secret %s: %w", ref, err)
	}
	return readReference(ref, s.readFile)
}

// readFile reads a file below the directory. Links that lead out of it are refused by os.Root.
func (s SecretStore) readFile(name string) ([]byte, error) {
	dir := s.Dir
	if dir == "" {
		dir = SecretsDir
	}
	relative, err := filepath.Rel(dir, name)
	if err != nil || !filepath.IsLocal(relative) {
		return nil, fmt.Errorf("it is not below %s, the directory for secrets", dir)
	}
	root, err := os.OpenRoot(dir)
	if err != nil {
		return nil, err
	}
	defer root.Close()
	file, err := root.Open(relative)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	return io.ReadAll(io.LimitReader(file, secretBytesMax))
}

// checkReference says what is wrong with a reference in a setting; whether the file is below the directory of
// secrets is known only where it is read.
func checkReference(ref string) error {
	kind, name, _ := strings.Cut(ref, ":")
	switch {
	case kind == "env" && (!strings.HasPrefix(name, SecretPrefix) || name == SecretPrefix):
		return fmt.Errorf("refers to the variable %s: settings may name only those that begin with %s",
			name, SecretPrefix)
	case kind == "file" && (!filepath.IsAbs(name) || filepath.Clean(name) != name):
		return fmt.Errorf("refers to the file %s: want an absolute path without the names . and .. in it", name)
	case kind != "env" && kind != "file":
		return errors.New("is no reference: want env:NAME or file:/path")
	}
	return nil
}

func readReference(ref string, readFile func(name string) ([]byte, error)) (string, error) {
	kind, name, _ := strings.Cut(ref, ":")
	switch kind {
	case "env":
		if value, ok := os.LookupEnv(name); ok && value != "" {
			return value, nil
		}
		return "", fmt.Errorf("read secret %s: variable is not set", ref)
	case "file":
		text, err := readFile(name)
		if err != nil {
			return "", fmt.Errorf("read secret %s: %w", ref, err)
		}
		if value := strings.TrimRight(string(text), "\r\n"); value != "" {
			return value, nil
		}
		return "", fmt.Errorf("read secret %s: file is empty", ref)
	}
	return "", errors.New("read secret: want env:NAME or file:/path")
}
