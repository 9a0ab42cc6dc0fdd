package scenarios

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// The scenarios that the table names are tested.
func TestTheScenariosOfTheTableAreThere(t *testing.T) {
	table, err := os.ReadFile("../../../README.md")
	if err != nil {
		t.Fatal(err)
	}
	directories := map[string]string{
		"": ".", "tollgate.": "../..", "lease.": "../lease", "smart.": "../smart", "charge.": "../charge",
		"tollgatehttp.": "../../tollgatehttp", "tollgategrpc.": "../../tollgategrpc",
	}
	named := regexp.MustCompile("`(\\w+\\.)?(Test\\w+)`").FindAllStringSubmatch(string(table), -1)
	if len(named) < 30 {
		t.Fatalf("only %d", len(named))
	}
	for _, one := range named {
		if code := testsIn(t, directories[one[1]]); !strings.Contains(code, "func "+one[2]+"(t *testing.T) {") {
			t.Errorf("there is no %s", one[0])
		}
	}
}

// testsIn is the code of the tests in a directory.
func testsIn(t *testing.T, directory string) string {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(directory, "*_test.go"))
	if err != nil {
		t.Fatal(err)
	}
	var code strings.Builder
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		code.Write(text)
	}
	return code.String()
}
