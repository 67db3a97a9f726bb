//! A list whose places keep their number: requests and operations are found again by the token that the engine returns.

pub struct Slab<T> {
    entries: Vec<Option<T>>,
    free: Vec<u32>,
}

impl<T> Default for Slab<T> {
    fn default() -> Self {
        Self { entries: Vec::new(), free: Vec::new() }
    }
}

impl<T> Slab<T> {
    pub fn insert(&mut self, value: T) -> u32 {
        if let Some(at) = self.free.pop() {
            self.entries[at as usize] = Some(value);
            return at;
        }
        self.entries.push(Some(value));
        (self.entries.len() - 1) as u32
    }

    pub fn get(&self, at: u32) -> Option<&T> {
        self.entries.get(at as usize)?.as_ref()
    }

    pub fn get_mut(&mut self, at: u32) -> Option<&mut T> {
        self.entries.get_mut(at as usize)?.as_mut()
    }

    pub fn remove(&mut self, at: u32) -> Option<T> {
        let value = self.entries.get_mut(at as usize)?.take()?;
        self.free.push(at);
        Some(value)
    }

    pub fn iter(&self) -> impl Iterator<Item = &T> {
        self.entries.iter().flatten()
    }

    pub fn len(&self) -> usize {
        self.entries.len() - self.free.len()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Numbers of all that is there now.
    pub fn keys(&self) -> Vec<u32> {
        (0..self.entries.len()).filter(|&at| self.entries[at].is_some()).map(|at| at as u32).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_used_again_and_only_when_free() {
        let mut slab = Slab::default();
        assert_eq!((slab.insert('a'), slab.insert('b')), (0, 1));
        assert_eq!(slab.remove(0), Some('a'));
        assert_eq!(slab.remove(0), None);
        assert_eq!(slab.remove(9), None);
        assert_eq!((slab.insert('c'), slab.insert('d')), (0, 2));
        assert_eq!(slab.len(), 3);
        assert_eq!(slab.get_mut(1), Some(&mut 'b'));
        assert_eq!(slab.keys(), [0, 1, 2]);
        assert_eq!(slab.iter().collect::<String>(), "cbd");
    }
}
