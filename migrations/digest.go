package migrations

import (
	"crypto/sha256"
	"encoding/hex"
	"io/fs"
)

// Digest identifies the embedded migrations and functions by names and contents: 64 hexadecimal digits.
// Databases migrated by programs of the same digest have the same schema.
func Digest() (string, error) {
	sum := sha256.New()
	err := fs.WalkDir(files, ".", func(name string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		text, err := files.ReadFile(name)
		part := sha256.Sum256(text)
		sum.Write([]byte(name))
		sum.Write(part[:])
		return err
	})
	if err != nil {
		return "", err
	}
	return hex.EncodeToString(sum.Sum(nil)), nil
}
